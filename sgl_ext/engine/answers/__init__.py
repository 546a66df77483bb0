"""What SGLang answers, completed: usage, stop reasons, signatures, and tool calls."""
