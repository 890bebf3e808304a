"""The main job from nothing to a streamed answer, each step with its time: `make demo`."""
