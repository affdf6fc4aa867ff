"""Virtual stages: clocks in place of vLLM's workers, so that its server is rehearsed on any machine.

To vLLM's scheduler a pipeline stage is a clock. Server, engine loop, scheduler, KV-cache manager and prefix
cache are vLLM's own; `isochunk rehearse` starts them. Only `executor.py`, `speaker.py` and `connector.py` import
vLLM.
"""
