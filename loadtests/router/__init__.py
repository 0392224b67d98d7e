"""Fleet's router beside other routers: the same light workers, the same client, in turn, round by round."""
