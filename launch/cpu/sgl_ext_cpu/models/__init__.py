"""The model classes a CPU server loads without looking further: see `qwen3`.

SGLang imports every model it knows, some two hundred modules, to find one. Named by
SGLANG_EXTERNAL_MODEL_PACKAGE, this package is searched first; any other model still
loads, after the long import.
"""
