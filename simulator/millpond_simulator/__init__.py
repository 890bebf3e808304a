"""A fleet in virtual time, built from the pure parts of the three programs."""
