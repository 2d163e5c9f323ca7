package in

type Base struct{}

func (Base) Shared() {}
func (*Base) Other() {}

type Hidden struct{}

func (Hidden) Shared() {}

type BaseLonger struct{}

type Third struct{}

func (BaseLonger) M() {}
func (Third) M()      {}
