"""The same work by other means.

These modules import neither hetero nor offload, so that a peer may live in an environment of its
own. The trainings are programs, `python -m bench.peers.NAME WORKLOAD.json RESULT.json MODE`; the
others (io_*, adam_*) are told over stdin when to take a sample, see serve.py.
"""
