"""Reading a request of any protocol as plain data. Pure: no HTTP, no SGLang."""
