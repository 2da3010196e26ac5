"""What may not leave a conversation: private data and its pseudonyms, and planted secrets.

`finders` says where private data stands, `redaction` replaces it, `canaries` plants secrets.
"""
