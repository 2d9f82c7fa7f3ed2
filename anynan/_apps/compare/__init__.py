"""Where two runs of the same model part, measured against what rounding explains."""
