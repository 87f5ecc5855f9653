"""The native CPU backend: a Program packed and fused for the C++ executor in native/."""
