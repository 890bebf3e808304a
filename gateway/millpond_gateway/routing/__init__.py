"""Pure decisions of the gateway: routing."""
