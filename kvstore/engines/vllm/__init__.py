"""vLLM: `KVStoreConnector`, its KV connector over the daemon.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector",
      "kv_connector_module_path": "kvstore.engines.vllm", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute"}'

connector -> scheduler side: lookups, plans, what to load and save
          -> worker side: loads between steps, saves after a step, measured times
"""

from typing import Any

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    # vLLM is loaded with the class and not with the modules beside it.
    if name == "KVStoreConnector":
        from kvstore.engines.vllm.connector import KVStoreConnector

        return KVStoreConnector
    raise AttributeError(name)
