"""Engine-neutral core: cost model, fit, flow shop, planner, calibrator, profile files."""
