"""The plugin: the only folder that imports vLLM."""
