"""What the machine can do: devices, dtypes, sensors, read speed."""
