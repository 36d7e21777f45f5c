"""Op groups that adapt the libraries of compute capability 10.x (FlashMLA, DeepGEMM, DeepEP, DeepSelect).

One module a group, each with one class named like core's contract without "Ops": `sm100.attention.Attention`. A library
is imported when its first op is created, after `refuse()` has found every function it needs.
"""
