"""Fluid replay of autoscaling rules over a day of traffic: requests as work, replicas as servers, no engine."""
