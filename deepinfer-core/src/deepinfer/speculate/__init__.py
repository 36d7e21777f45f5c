"""Speculative decoding: who proposes drafts, how many of them are verified, and what that is worth.

`proposer` is the interface and the registry; `dspark` and `ngram` implement it on the device. `schedule` chooses how
many drafts a step verifies, from `confidence` and a cost model (`costs`), on the host. Verification itself is the op
`sampling.verify`. The package knows neither requests nor steps of the engine.
"""
