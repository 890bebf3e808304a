"""What two or more Millpond programs must agree on."""
