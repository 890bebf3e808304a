"""Everything the driver refuses or fails with.

    DevclusterError
    ├── MissingToolError       a program is not installed
    ├── NotRootError           the operation needs root
    ├── NoSpaceError           the disk is too full to start
    ├── PortInUseError         an address or port belongs to another program
    ├── BuildError             the Go build failed
    ├── LockTimeoutError       another devcluster command holds the cluster too long
    ├── NotRunningError        the operation needs a running cluster or node
    └── StartError             a program ended or did not get ready in time

The caller prints the message as one line, so each says what happened, where, and what to do.
"""


class DevclusterError(Exception):
    """Base of every error with a message for the user."""


class MissingToolError(DevclusterError):
    """A program the cluster needs is not installed."""


class NotRootError(DevclusterError):
    """The operation needs root."""


class NoSpaceError(DevclusterError):
    """The disk is too full for what was asked."""


class PortInUseError(DevclusterError):
    """A fixed port or an address range belongs to another program."""


class BuildError(DevclusterError):
    """Compiling the cluster's programs failed."""


class LockTimeoutError(DevclusterError):
    """Another devcluster command did not finish in time."""


class NotRunningError(DevclusterError):
    """The operation needs a running cluster, or a node in it."""


class StartError(DevclusterError):
    """A program ended, or did not get ready before its deadline."""
