"""Structured output: from what a request asks for to the masks of its rows.

    so_args -> builder: a grammar, compiled in a process that can be killed -> constraint: one request's state in it
            -> masks: which tokens each row of a step may yield

`grammar` is the interface to grammar engines, `xgrammar_engine` the one that comes with it; `json_schema` and `regex`
say
what a schema may contain. Knows no request queue and no scheduler; the engine uses `builder`, `constraint` and `masks`.
"""
