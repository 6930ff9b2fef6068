def install(active): pass
