"""A host's health for training: facts read from files and commands, and judgements about them.

    facts = read_host(HostFiles())      # reads, changes nothing
    diagnoses = judge_host(facts)       # pure: the same facts, the same diagnoses

Facts are frozen values, which ranks send each other as JSON. Nothing here imports torch.
"""
