"""The same training by other means.

These modules import neither hetero nor offload, so that a peer may live in an environment of its
own. Each is a program: `python -m bench.peers.NAME WORKLOAD.json RESULT.json MODE`.
"""
