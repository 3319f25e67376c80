"""Are the nodes of a run what it takes them for? Asked before roles are built, and by `megatron-rl check-cluster`.

node_report.py    what is learnt of nodes, as plain data; which ranks measure an all-reduce together
node_facts.py     versions, GPUs, links and adapters of this machine
checked_rank.py   one rank: what it sees, its clock, its all-reduces
cluster_check.py  starts the ranks, asks, and ends them
node_rules.py     the judge: from reports to findings
"""
