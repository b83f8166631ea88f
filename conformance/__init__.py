"""The conformance suite: any backend against stock Diffrax, with `python -m gradsolve_backend.conformance`."""
