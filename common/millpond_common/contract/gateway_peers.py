"""The key by which gateways of a namespace know one another: the Secret that holds it, and where gateways find it."""

from __future__ import annotations

from typing import Final

ENTRY: Final = "key"
"""Of the Secret `labels.GATEWAY_NAME`: one key a line; each is accepted, the first is preferred."""
DIRECTORY: Final = "/etc/millpond/peers"
"""Where the Secret is mounted in a gateway. A gateway that has the directory hears no peer without a key, however empty it
is; the file is ENTRY."""
MIN_KEY_BYTES: Final = 16
