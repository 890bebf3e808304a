"""The Deployment of one role and revision, and the record of how it was made.

The record is an immutable ConfigMap that holds the engine's configuration, the rendered pod template and the spec it
came from. A revision that has a record is always made from it, never rendered anew: so an operator upgrade
restarts no engine, and the spec of an earlier revision can be read back and applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from millpond_common.contract.engine_config import dump_engine_config
from millpond_operator.api.pool import InferencePool, RoleView
from millpond_operator.desired.engine_config import make_engine_config
from millpond_operator.desired.kinds import CONFIG_MAP, DEPLOYMENT
from millpond_operator.desired.manifest import Manifest, Owner, compute_digest, make_manifest
from millpond_operator.desired.names import make_workload_labels, make_workload_name, make_workload_selector
from millpond_operator.desired.pod import make_pod_template
from millpond_operator.desired.revision import compute_revision, strip_defaults
from millpond_operator.desired.settings import BuildSettings
from millpond_operator.desired.volumes import CONFIG_KEY

# The emitter in C writes the same text in a tenth of the time, which is most of the time of a decision.
Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
TEMPLATE_KEY = "pod-template.json"
SPEC_KEY = "spec.json"


@dataclass(frozen=True, slots=True)
class RevisionRecord:
    """How the pods of one role and revision are made."""

    pool: str
    role: str
    """Lower case, as in labels."""
    revision: str
    engine_yaml: str
    template: Mapping[str, Any]
    spec_json: str

    @property
    def name(self) -> str:
        """Name of the Deployment and of the ConfigMap."""
        return make_workload_name(self.pool, self.role, self.revision)


def make_record(pool: InferencePool, role: RoleView, settings: BuildSettings) -> RevisionRecord:
    """Render the current revision of a role."""
    name, label, revision = pool.metadata.name, role.role.lower(), compute_revision(pool, role)
    config = dump_engine_config(make_engine_config(pool, role))
    engine_yaml = yaml.dump(config, Dumper=Dumper, sort_keys=False, allow_unicode=True)
    template = make_pod_template(
        pool,
        role,
        revision=revision,
        config_name=make_workload_name(name, label, revision),
        config_digest=compute_digest(engine_yaml),
        settings=settings,
    )
    spec_json = json.dumps({"spec": strip_defaults(pool.spec)}, indent=2, ensure_ascii=False)
    return RevisionRecord(name, label, revision, engine_yaml, template, spec_json)


def parse_record(body: Mapping[str, Any], *, pool: str, role: str, revision: str) -> RevisionRecord | None:
    """Read a record back; None when the ConfigMap is not one (somebody replaced it)."""
    data = body.get("data") or {}
    try:
        template = json.loads(data[TEMPLATE_KEY])
        return RevisionRecord(pool, role, revision, data[CONFIG_KEY], template, data.get(SPEC_KEY, ""))
    except (KeyError, ValueError):
        return None


def make_record_manifest(
    owner: Owner, record: RevisionRecord, *, annotations: Mapping[str, str] | None = None
) -> Manifest:
    """The ConfigMap of a revision; only its annotations can change."""
    data = {
        CONFIG_KEY: record.engine_yaml,
        TEMPLATE_KEY: json.dumps(record.template, sort_keys=True),
        SPEC_KEY: record.spec_json,
    }
    made = make_manifest(
        CONFIG_MAP,
        owner.namespace,
        record.name,
        own_labels=make_workload_labels(record.pool, record.role, record.revision),
        owners=[owner.make_reference(controller=True)],
        content={"immutable": True, "data": data},
    )
    made.body["metadata"]["annotations"].update(annotations or {})
    return made


def make_workload_manifest(owner: Owner, record: RevisionRecord, *, replicas: int) -> Manifest:
    """The Deployment of a revision at a count."""
    # Its template never changes, so its own rollout never runs; if somebody edits the template and the operator
    # puts it back, pods are replaced one at a time and without needing room for more.
    spec = {
        "replicas": replicas,
        "revisionHistoryLimit": 1,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "selector": {"matchLabels": make_workload_selector(record.pool, record.role, record.revision)},
        "template": record.template,
    }
    return make_manifest(
        DEPLOYMENT,
        owner.namespace,
        record.name,
        own_labels=make_workload_labels(record.pool, record.role, record.revision),
        owners=[owner.make_reference(controller=True)],
        content={"spec": spec},
    )
