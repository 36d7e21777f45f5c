"""Op groups made of this package's own kernels, for compute capability 9.x; kernels that also run on 10.x serve there.

One module a group, each with one class named like core's contract without "Ops": `sm90.attention.Attention`. It derives
from `OnMachine` and the contract, and its `refuse()` says which capabilities a kernel was built and tested for. A group
without a module is served by core.
"""
