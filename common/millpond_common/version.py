"""Version of the whole product: distribution, images, chart and programs share it."""

__version__ = "0.1.0"
