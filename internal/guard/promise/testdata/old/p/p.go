package p

import "example.com/made/internal/in"

const Limit = 1

var Loose struct{ A int }

type Engine interface{ Apply() error }

type Impl struct{}

func (Impl) Apply() error { return nil }

type Config struct {
	Name string
	Size int
}

type Outer struct {
	Config
	in.Hidden
}

type List[K comparable, V any] struct{ Items map[K]V }

func (l *List[K, V]) Add(k K, v V) {}
func (l *List[K, V]) Len() int     { return 0 }

type Feed chan int

type Kept struct{}

func (*Kept) Status() string { return "" }
func (Kept) Value()          {}

func Open(name string) error { return nil }
func Swap()                  {}

type hidden struct{ X int }

func Hidden() *hidden { return nil }

// Alias is an internal type for everybody.
type Alias = in.Base

// Own has no methods of Third.
type Own in.Third

type Fn func()
