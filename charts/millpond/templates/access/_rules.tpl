{{/* What the programs may do. A test compares these rules with the calls they make. */}}

{{/* In the namespaces that are served. */}}
{{- define "millpond.operatorRules" -}}
- apiGroups: [millpond.dev]
  resources: [inferencepools]
  verbs: [get, list, watch, patch]
- apiGroups: [millpond.dev]
  resources: [inferencepools/status]
  verbs: [get, patch]
# Owner references that block the owner's deletion.
- apiGroups: [millpond.dev]
  resources: [inferencepools/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts, persistentvolumeclaims]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, patch, delete]
# The key by which the gateways of a namespace know one another; made by server-side apply, which names its object.
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [millpond-gateway]
  verbs: [get, create, patch, delete]
# Gateways get this one role and no other.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [{{ ternary "clusterroles" "roles" (eq .Values.scope "Cluster") }}]
  resourceNames: [{{ include "millpond.gatewayRoleName" . }}]
  verbs: [bind]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch, delete]
# How far the fetch step of a replica is, for the pool's status.
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
# Whether an HPA or KEDA owns a pool's count, for its conditions.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list]
# How many devices a replica asks for where it does so by resource claim.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims, resourceclaimtemplates]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [get, create, patch]
{{- with .Values.rbac.secretNames }}
- apiGroups: [""]
  resources: [secrets]
  resourceNames: {{ toJson . }}
  verbs: [get]
{{- end }}
{{- end -}}

{{/* Across the cluster, where it is allowed to look. */}}
{{- define "millpond.operatorClusterRules" -}}
# Notices the CRD when it is installed after the operator.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
# Free room of the nodes, for rollouts that know capacity; their kinds and zones, for start times and for who leaves.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list]
# Free devices, for pools that ask for some by resource claim.
- apiGroups: [resource.k8s.io]
  resources: [resourceslices, resourceclaims, deviceclasses]
  verbs: [list]
{{- end -}}

{{- define "millpond.gatewayRules" -}}
- apiGroups: [millpond.dev]
  resources: [inferencepools]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
{{- with .Values.rbac.secretNames }}
- apiGroups: [""]
  resources: [secrets]
  resourceNames: {{ toJson . }}
  verbs: [get]
{{- end }}
{{- end -}}
