"""SGLang's CUDA path on a machine without a GPU: ``torch.cuda`` answers, references compute.

A process is on the stage when ``site/sitecustomize.py`` was found at its start; ``on_stage`` makes
the environment in which a server's processes are.
"""
