"""Training with several processes, called ranks.

world       what a rank does together with the others: dividing packs, sums, commands
follower    the commands that load and restore models, and the life of the ranks other than 0
"""
