"""Data only: calibrations that ship with xspec, one JSON file a platform; read by `xspec.cost.shipped`."""
