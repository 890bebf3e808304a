"""Pure decisions of the gateway: flow."""
