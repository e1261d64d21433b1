# The modules are loaded and there is no device.
:
