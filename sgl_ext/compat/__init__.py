"""What repairs SGLang: one file for each fault, which ends with a version of SGLang that mends it.

Each file says what the fault is, which hooks mend it (`python -m sgl_ext.engine.hooks`), which
tests show it, and which patch in docs/upstream mends it in SGLang.
"""
