"""Are the nodes of a run what it takes them for? Asked before roles are built, and by `megatron-rl check-cluster`.

node_report.py    what is learnt of nodes, as plain data; which ranks measure an all-reduce together
node_facts.py     versions, GPUs, links and adapters of this machine
cluster_check.py  one rank with its facts, clock and all-reduces; the check that starts, asks and ends the ranks
node_rules.py     the judge: from reports to findings
"""
