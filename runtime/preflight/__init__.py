"""Tests of the machines before a long run. Results go into the run record, never into a calibration."""
