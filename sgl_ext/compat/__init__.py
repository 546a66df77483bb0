"""What repairs SGLang: one file a fault, which ends with the version of SGLang that mends it."""
