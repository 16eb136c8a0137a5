"""Expert MLPs whose frozen base stays packed (MXFP4, fp8 blocks), with LoRA."""
