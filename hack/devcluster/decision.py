"""What `up` has to do, decided from what is there."""

import enum
from dataclasses import dataclass

CONTROL_PLANE_ROLES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
LINK_ROLE, NODE_ROLE = "link", "node"
NODE_ROLES = (NODE_ROLE, "registry", "containerd", "kubelet", "kube-proxy", "coredns")


class Next(enum.Enum):
    """The next thing to do, with its reason."""

    NOTHING = "already up"
    START = "nothing runs"
    CLEAN_AND_START = "an earlier run left something behind"
    ADD_NODE = "the control plane runs without a node"
    CLEAN_AND_ADD_NODE = "the node is not whole"


@dataclass(frozen=True)
class Observed:
    """What is there at one instant. Everything but remains is false when no record is worth believing."""

    has_record: bool = False
    has_remains: bool = False
    control_plane_alive: bool = False
    control_plane_answers: bool = False
    node_recorded: bool = False
    node_alive: bool = False
    node_ready: bool = False


def decide(observed: Observed, *, want_node: bool) -> Next:
    """Decide what `up` has to do. Anything but a whole, answering control plane is started afresh."""
    if not observed.has_record:
        return Next.CLEAN_AND_START if observed.has_remains else Next.START
    if not (observed.control_plane_alive and observed.control_plane_answers):
        return Next.CLEAN_AND_START
    if not want_node or (observed.node_alive and observed.node_ready):
        return Next.NOTHING
    return Next.CLEAN_AND_ADD_NODE if observed.node_recorded else Next.ADD_NODE
