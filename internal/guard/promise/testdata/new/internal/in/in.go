package in

type Base struct{}

func (*Base) Other() {}

type Hidden struct{}

type BaseLonger struct{}

type Third struct{}
