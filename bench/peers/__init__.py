"""The same training by other systems, in modules that import neither hetero nor offload."""
