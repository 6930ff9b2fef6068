"""Code that runs inside SGLang's processes. Only this package imports sglang."""
