osb sandbox get <sandbox-id> -o json
osb sandbox health <sandbox-id> -o json
