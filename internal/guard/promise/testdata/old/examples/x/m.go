package main

func main() {}

type X int
