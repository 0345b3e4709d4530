osb sandbox kill <sandbox-id> -o json
