"""SGLang plugin for mixture-of-experts serving on PCIe Blackwell workstations (SM120). Importing it costs nothing."""

__version__ = "0.1.0"
