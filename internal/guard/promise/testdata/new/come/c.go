package come
