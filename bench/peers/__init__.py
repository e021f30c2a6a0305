"""The same work by other systems, in modules that import neither hetero nor offload.

So a peer may live in an environment of its own. train.py does a whole training; the others are told
over stdin when to take a sample, see serve.py.
"""
