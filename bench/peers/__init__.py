"""The same work by other systems, in modules that import neither hetero nor offload.

So a peer may live in an environment of its own. The programs of training/ do a whole training,
`python -m bench.peers.training.NAME WORKLOAD.json RESULT.json MODE`; the others (io_*, adam,
deepspeed_step) are told over stdin when to take a sample, see serve.py.
"""
