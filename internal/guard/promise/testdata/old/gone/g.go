package gone
