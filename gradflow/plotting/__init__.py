"""Pictures: take ``ax=``, return axes."""
